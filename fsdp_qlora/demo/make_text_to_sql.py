"""Make the demo's questions: `python -m fsdp_qlora.demo.make_text_to_sql`.

This rewrites the bundled files beside it, which come out the same every time.

Held-out questions are about worlds whose tables no training question mentions, so the score on
them measures SQL, not memory. A question is kept only if running its SQL can tell a right answer
from a lazy one: see `_is_telling`.
"""

import json
import random
import re
from functools import cache

from .prompts import HELDOUT_FILE, SCHEMAS_FILE, TRAIN_FILE, message, prompt_messages
from .questions import KINDS, Question
from .score import execute, is_ordered, same_result
from .worlds import World, read_worlds

SEED = 0
_TRAIN_PER_KIND, _HELDOUT_PER_KIND = 3, 1  # questions of each kind about each world
TRIES = 200  # draws per kind before fewer questions will do

run = cache(execute)  # trivial queries come back for every question about a world


def main():
    worlds = read_worlds(SEED)
    write_rows(TRAIN_FILE, make_rows(worlds, "training", _TRAIN_PER_KIND))
    write_rows(HELDOUT_FILE, make_rows(worlds, "held out", _HELDOUT_PER_KIND))
    schemas = {world.name: world.sql() for world in worlds}
    SCHEMAS_FILE.write_text(json.dumps(schemas, indent=1) + "\n")


def make_rows(worlds: list[World], split: str, per_kind: int) -> list[dict]:
    """All rows of a split, shuffled."""
    rng = random.Random(f"{SEED} {split}")
    rows = [
        _make_row(world, kind, question)
        for world in worlds
        if world.split == split
        for kind in KINDS
        for question in _draw_questions(world, kind, per_kind, rng)
    ]
    rng.shuffle(rows)
    return rows


def _draw_questions(world: World, kind: str, count: int, rng: random.Random) -> list[Question]:
    """Up to `count` telling questions of a kind, no two with the same text."""
    questions, schema_sql = {}, world.sql()
    for _ in range(TRIES):
        question = KINDS[kind](world, rng)
        if question.text not in questions and _is_telling(question.sql, world, schema_sql):
            questions[question.text] = question
        if len(questions) == count:
            break
    return list(questions.values())


def _is_telling(sql: str, world: World, schema_sql: str) -> bool:
    """Whether a query finds something, and something else than every query lazier than it."""
    gold = run(schema_sql, sql)
    if not gold or gold == [(None,)]:
        return False
    lazy = [run(schema_sql, other) for other in [*shortened(sql), *_trivial(world)]]
    return not any(same_result(gold, other, is_ordered(sql)) for other in lazy)


def shortened(sql: str) -> list[str]:
    """A query less one of its clauses, conditions or its DISTINCT, where that is still a query."""
    clauses = re.split(r" (?=(?:WHERE|GROUP BY|HAVING|ORDER BY|LIMIT)\b)", sql)
    queries = [" ".join(clauses[:i] + clauses[i + 1 :]) for i in range(1, len(clauses))]
    if both := re.fullmatch(r"(.* WHERE )((?:(?!BETWEEN).)*) (?:AND|OR) (.*)", sql):
        before, first, second = both.groups()
        queries += [before + first, before + second]
    if "DISTINCT " in sql:
        queries.append(sql.replace("DISTINCT ", ""))
    # HAVING without GROUP BY is an error in older sqlite.
    return [query for query in queries if "HAVING" not in query or "GROUP BY" in query]


def _trivial(world: World) -> list[str]:
    """Queries that say nothing but which table, or which column."""
    return [
        f"SELECT {what} FROM {table.name}"
        for table in world.tables
        for what in ["*", "COUNT(*)", *table.column_names]
    ]


def _make_row(world: World, kind: str, question: Question) -> dict:
    prompt = prompt_messages(world.notation(), question.text)
    messages = [*prompt, message("assistant", question.sql)]
    return {"messages": messages, "schema": world.name, "kind": kind}


def write_rows(path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
