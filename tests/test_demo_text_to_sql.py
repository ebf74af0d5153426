"""The demo's questions can be trusted, and its scorer is right about answers it did not expect."""

import re
import time
from collections import Counter

import pytest

from fsdp_qlora.demo import make_text_to_sql, prompts
from fsdp_qlora.demo.score import _extract_sql, execute, is_ordered, same_result, score
from tests.patience import patience

PETS = """
CREATE TABLE pet (id, name, age, weight);
INSERT INTO pet VALUES (1, 'Max', 3, 1.5), (2, 'Coco', 7, 2.25), (3, 'Nemo', 5, NULL);
"""
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"


@pytest.fixture(scope="module")
def train():
    return prompts.load_rows(prompts.TRAIN_FILE)


@pytest.fixture(scope="module")
def heldout():
    return prompts.load_rows(prompts.HELDOUT_FILE)


@pytest.fixture(scope="module")
def schemas():
    return prompts.load_schemas()


def pet_row(gold, kind="where"):
    messages = prompts.prompt_messages("pet(id, name, age, weight)", "Which pets?")
    messages.append(prompts.message("assistant", gold))
    return {"messages": messages, "schema": "p", "kind": kind}


def is_right(gold, answer):
    return score([pet_row(gold)], [answer], {"p": PETS}).accuracy == 1


# The questions


def test_the_script_makes_the_bundled_files(tmp_path, monkeypatch):
    for name in ["TRAIN_FILE", "HELDOUT_FILE", "SCHEMAS_FILE"]:
        monkeypatch.setattr(make_text_to_sql, name, tmp_path / getattr(prompts, name).name)
    make_text_to_sql.main()
    for file in [prompts.TRAIN_FILE, prompts.HELDOUT_FILE, prompts.SCHEMAS_FILE]:
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_heldout_tables_are_not_in_training(train, heldout, schemas):
    def tables(rows):
        sql = " ".join(schemas[name] for name in {row["schema"] for row in rows})
        return set(re.findall(r"CREATE TABLE (\w+)", sql))

    assert not tables(train) & tables(heldout)
    assert len(tables(train)) >= 24 and len(tables(heldout)) >= 10


def test_there_are_enough_rows_of_every_kind_and_no_two_alike(train, heldout):
    assert len(train) >= 1200 and len(heldout) >= 120
    for rows, fewest in [(train, 50), (heldout, 5)]:
        counts = Counter(row["kind"] for row in rows)
        assert set(counts) == set(make_text_to_sql.KINDS) and min(counts.values()) >= fewest
        assert len({row["messages"][1]["content"] for row in rows}) == len(rows)


def test_every_reference_query_finds_something_that_no_bare_query_finds(train, heldout, schemas):
    for row in train + heldout:
        schema_sql, gold = schemas[row["schema"]], row["messages"][-1]["content"]
        rows, table = (
            make_text_to_sql.run(schema_sql, gold),
            re.search(r"FROM (\w+)", gold).group(1),
        )
        assert rows and rows != [(None,)], gold
        for bare in [f"SELECT * FROM {table}", f"SELECT COUNT(*) FROM {table}"]:
            assert not same_result(
                rows, make_text_to_sql.run(schema_sql, bare), is_ordered(gold)
            ), gold


@pytest.mark.parametrize(
    "sql, shorter",
    [
        (
            "SELECT a FROM t WHERE b = 1 ORDER BY c LIMIT 3",
            [
                "SELECT a FROM t ORDER BY c LIMIT 3",
                "SELECT a FROM t WHERE b = 1 LIMIT 3",
                "SELECT a FROM t WHERE b = 1 ORDER BY c",
            ],
        ),
        (
            "SELECT a FROM t WHERE b = 1 OR c > 2",
            ["SELECT a FROM t", "SELECT a FROM t WHERE b = 1", "SELECT a FROM t WHERE c > 2"],
        ),
        ("SELECT a FROM t WHERE b BETWEEN 1 AND 2", ["SELECT a FROM t"]),
        ("SELECT a FROM t GROUP BY a HAVING COUNT(*) > 1", ["SELECT a FROM t GROUP BY a"]),
        ("SELECT DISTINCT a FROM t", ["SELECT a FROM t"]),
    ],
)
def test_a_question_is_kept_only_if_it_needs_each_part_of_its_query(sql, shorter):
    assert make_text_to_sql.shortened(sql) == shorter


def test_prompts_hold_the_schema_and_the_question(heldout):
    row = heldout[0]
    notation, question = row["messages"][1]["content"].rsplit("\n", 1)
    assert prompts.tuned_messages(row) == prompts.prompt_messages(notation, question)
    *example, last = prompts.base_messages(row)
    assert example[-1] == {"role": "assistant", "content": prompts.EXAMPLE_SQL}
    assert last["content"] == f"Tables:\n{notation}\nQuestion: {question}\nSQL:"


# Finding the query in an answer


@pytest.mark.parametrize(
    "answer",
    [
        "SELECT name FROM pet WHERE age > 3",
        "  SELECT name\n  FROM pet\n  WHERE age > 3;\n",
        "SQL: SELECT name FROM pet WHERE age > 3",
        "```sql\nSELECT name FROM pet WHERE age > 3;\n```\nThis lists the names.",
        "```\nSELECT name FROM pet WHERE age > 3\n```",
        "You can use `SELECT name FROM pet WHERE age > 3` here.",
        "I will select the names with this query:\n\nSELECT name FROM pet WHERE age > 3",
        "The query is SELECT name FROM pet WHERE age > 3; it selects the names.",
        "SELECT name FROM pet WHERE age > 3\n\nThis query selects the names from the table.",
        "SELECT name FROM pet WHERE age > 3<|im_end|>",
        "SELECT name FROM pet WHERE age > 3; SELECT age FROM pet;",
    ],
)
def test_a_query_is_found_in_an_answer(answer):
    assert _extract_sql(answer) == "SELECT name FROM pet WHERE age > 3"


@pytest.mark.parametrize(
    "answer, sql",
    [
        ("select name from pet", "select name from pet"),
        ("SELECT ';' || name FROM pet;", "SELECT ';' || name FROM pet"),
        ("WITH old AS (SELECT 1) SELECT 2;", "WITH old AS (SELECT 1) SELECT 2"),
        ("With two names, I would select both.", ""),
        ("I do not know.", ""),
        ("", ""),
    ],
)
def test_odd_answers_give_their_query_or_none(answer, sql):
    assert _extract_sql(answer) == sql


# Running and comparing


@pytest.mark.parametrize(
    "gold, answer",
    [
        ("SELECT name FROM pet", "SELECT name AS n FROM pet ORDER BY age DESC"),
        ("SELECT AVG(age) FROM pet", "SELECT SUM(age) / 3.0 FROM pet"),
        ("SELECT AVG(age) FROM pet", "SELECT AVG(age) + 0.0000001 FROM pet"),
        ("SELECT name, weight FROM pet", "SELECT name, weight FROM pet ORDER BY weight"),
        ("SELECT name FROM pet ORDER BY age", "SELECT name FROM pet ORDER BY age ASC"),
    ],
)
def test_the_same_rows_in_other_words_are_right(gold, answer):
    assert is_right(gold, answer)


@pytest.mark.parametrize(
    "gold, answer",
    [
        ("SELECT name FROM pet ORDER BY age", "SELECT name FROM pet ORDER BY age DESC"),
        ("SELECT name FROM pet", "SELECT name, age FROM pet"),
        ("SELECT name FROM pet", "SELECT name FROM pet WHERE age > 3"),
        ("SELECT name FROM pet", "SELECT name FROM pet UNION ALL SELECT 'Max'"),
        ("SELECT AVG(age) FROM pet", "SELECT AVG(age) + 0.001 FROM pet"),
        ("SELECT age FROM pet WHERE id = 1", "SELECT '3'"),
        ("SELECT COUNT(*) FROM pet", ""),
    ],
)
def test_other_rows_are_wrong(gold, answer):
    assert not is_right(gold, answer)


@pytest.mark.parametrize(
    "sql, complaint",
    [
        ("DROP TABLE pet", "not authorized"),
        ("DELETE FROM pet", "not authorized"),
        ("ATTACH DATABASE 'stolen.db' AS other", "not authorized"),
        ("PRAGMA writable_schema = 1", "not authorized"),
        ("SELECT 1; DROP TABLE pet", "one statement"),
        ("SELECT age FROM cat", "no such table"),
        ("SELECT zeroblob(1000000000)", "too big"),
        ("SELECT 1 FROM pet a, pet b, pet c, pet d, pet e, pet f, pet g", "more than 1000 rows"),
        ("-- nothing", "no query"),
        ("", "no query"),
    ],
)
def test_a_query_that_is_not_a_small_read_is_refused(tmp_path, monkeypatch, sql, complaint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        execute(PETS, sql)
    assert list(tmp_path.iterdir()) == []


def test_an_endless_query_is_stopped(monkeypatch):
    monkeypatch.setattr("fsdp_qlora.demo.score.MAX_SECONDS", 0.1)
    start = time.monotonic()
    with pytest.raises(ValueError, match="interrupted"):
        execute(PETS, ENDLESS)
    assert time.monotonic() - start < patience(5)


# The score


def test_reference_answers_score_100_percent(train, heldout):
    for rows in [train, heldout]:
        result = score(rows, [row["messages"][-1]["content"] for row in rows])
        assert result.accuracy == result.executable == 1 and result.failures == []


def test_a_score_tells_wrong_from_broken_and_counts_by_kind():
    gold = "SELECT name FROM pet WHERE age > 3"
    rows = [pet_row(gold, kind) for kind in ["compare", "compare", "like", "like"]]
    result = score(rows, [gold, "SELECT name FROM pet", "SELECT oops", "I cannot."], {"p": PETS})
    assert (result.accuracy, result.executable) == (0.25, 0.5)
    assert result.by_kind == {"compare": (1, 2), "like": (0, 2)}
    wrong, broken, silent = result.failures
    assert wrong.error == "" and "oops" in broken.error and silent.predicted == ""
    assert "right 25.0%, executable 50.0%" in str(result)


def test_a_missing_answer_is_a_clear_error():
    with pytest.raises(ValueError, match="one answer for each row, got 0 for 1"):
        score([pet_row("SELECT 1")], [])
