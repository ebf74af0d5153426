"""What the demo says to a model, and the bundled questions and databases.

The tuned model is trained on, and asked with, `prompt_messages`. A base model was never shown that
format, so `base_messages` puts a worked example before it; otherwise its score would measure
whether it guessed the format, not whether it can write SQL.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
TRAIN_FILE = FOLDER / "text_to_sql_train.jsonl"
HELDOUT_FILE = FOLDER / "text_to_sql_heldout.jsonl"
SCHEMAS_FILE = FOLDER / "text_to_sql_schemas.json"

SYSTEM = "Answer with one SQL query."

EXAMPLE = {
    "user": "owner(id, name, city)\ncar(id, brand, price, owner_id)\n"
    "Show the brands of cars whose price is above 900.",
    "assistant": "SELECT brand FROM car WHERE price > 900",
}


def prompt_messages(notation: str, question: str) -> list[dict]:
    """The chat before the answer: a system line, then the schema (a table a line) and the question."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{notation}\n{question}"},
    ]


def tuned_messages(row: dict) -> list[dict]:
    """The prompt of a row of the data: all its messages but the answer."""
    return row["messages"][:-1]


def base_messages(row: dict) -> list[dict]:
    """The same prompt with a worked example before it, for a model that was not tuned."""
    system, user = tuned_messages(row)
    example = [{"role": role, "content": content} for role, content in EXAMPLE.items()]
    return [system, *example, user]


def load_rows(path: Path) -> list[dict]:
    """Rows of a JSON lines file: `messages`, `schema` (a name in the schemas file) and `kind`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_schemas(path: Path = SCHEMAS_FILE) -> dict[str, str]:
    """The SQL that builds each database, by name."""
    return json.loads(path.read_text())
