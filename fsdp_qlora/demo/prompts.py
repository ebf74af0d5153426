"""What the demo says to a model, and the bundled questions and databases.

The tuned model is trained on, and asked with, the terse `prompt_messages`. A model that was not
tuned never saw that format and would be scored on guessing it, so `base_messages` labels the
parts and shows a worked example first. SmolLM2-135M scored 0 to 5% with each of four such prompts.
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
TRAIN_FILE = FOLDER / "text_to_sql_train.jsonl"
HELDOUT_FILE = FOLDER / "text_to_sql_heldout.jsonl"
SCHEMAS_FILE = FOLDER / "text_to_sql_schemas.json"

_SYSTEM = "Answer with one SQL query."

_EXAMPLE_NOTATION = "owner(id, name, city)\ncar(id, brand, price, owner_id)"
_EXAMPLE_QUESTION = "Show the brands of cars whose price is above 900."
EXAMPLE_SQL = "SELECT brand FROM car WHERE price > 900"


def prompt_messages(notation: str, question: str) -> list[dict]:
    """The chat before the answer. `notation`: the schema, a table a line: `car(id, brand)`."""
    return [message("system", _SYSTEM), message("user", f"{notation}\n{question}")]


def base_messages(row: dict) -> list[dict]:
    """The prompt of a row for a model that was not tuned: labelled, after a worked example."""
    notation, _, question = row["messages"][-2]["content"].rpartition("\n")
    return [
        message("user", _labelled(_EXAMPLE_NOTATION, _EXAMPLE_QUESTION)),
        message("assistant", EXAMPLE_SQL),
        message("user", _labelled(notation, question)),
    ]


def tuned_messages(row: dict) -> list[dict]:
    """The prompt of a row for a tuned model: all its messages but the answer."""
    return row["messages"][:-1]


def _labelled(notation: str, question: str) -> str:
    return f"Tables:\n{notation}\nQuestion: {question}\nSQL:"


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def load_rows(path: Path) -> list[dict]:
    """Rows of a JSON lines file: `messages`, `schema` (a name in the schemas file) and `kind`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_schemas() -> dict[str, str]:
    """The SQL that builds each bundled database, by name."""
    return json.loads(SCHEMAS_FILE.read_text())
