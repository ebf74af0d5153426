"""Questions about a world, each with the SQL that answers it, in the kinds a beginner meets.

A kind is a function that draws one question. Wordings vary, but each says which columns it wants
and in what order, so that one result is right and running the SQL can tell.
"""

import random
from dataclasses import dataclass

from .worlds import Column, Table, World

KINDS = {}  # name -> function(world, rng) -> Question


@dataclass
class Question:
    text: str
    sql: str


@dataclass
class Condition:
    sql: str  # what stands after WHERE
    words: str  # what stands after the noun: "singers *from France*"


def kind(draw):
    """Register a kind of question under its function's name."""
    KINDS[draw.__name__] = draw
    return draw


# How one asks


def ask_for(what: str, rng: random.Random) -> str:
    openings = ["Show {}.", "List {}.", "Give {}.", "Find {}.", "What are {}?", "I need {}."]
    return rng.choice(openings).format(what)


def labels_of(table: Table, rng: random.Random) -> str:
    label = table.label.spoken
    return rng.choice([f"the {label}s of {table.plural}", f"the {label}s of all {table.plural}"])


def how_many(things: str, rng: random.Random) -> str:
    openings = ["How many {} are there?", "Count the {}.", "What is the number of {}?"]
    return rng.choice(openings).format(things)


def some_table(world: World, rng: random.Random, *having: str) -> Table:
    """A table that has such columns; mostly the child, which has more to ask about."""
    tables = [world.parent, world.child, world.child]
    return rng.choice([table for table in tables if all(getattr(table, what) for what in having)])


# Conditions. `owner` is put before a column's name in a join: "singer."


def quoted(word: str) -> str:
    return f"'{word}'"


def category_is(table: Table, rng: random.Random, owner: str = "") -> Condition:
    column = rng.choice(table.categories)
    word = rng.choice(table.values(column))
    said = [f"whose {column.spoken} is *", f"with {column.spoken} *", *2 * column.phrases]
    return Condition(f"{owner}{column.name} = {quoted(word)}", rng.choice(said).replace("*", word))


def number_is(table: Table, rng: random.Random, owner: str = "") -> Condition:
    column = rng.choice(table.numbers)
    # Not at the ends, so that some rows pass and some do not.
    number = rng.choice(table.values(column)[1:-1])
    operator, said = rng.choice(comparisons(column))
    words = rng.choice(said).replace("*", str(number))
    return Condition(f"{owner}{column.name} {operator} {number}", words)


def comparisons(column: Column) -> list[tuple[str, list[str]]]:
    """Operators with the ways to say them; a phrase of the column's own counts twice."""
    name = column.spoken
    more, less = column.phrases or ([], [])
    return [
        (">", [f"whose {name} is above *", f"with {name} over *", *2 * [more or f"whose {name} is more than *"]]),
        ("<", [f"whose {name} is below *", f"with {name} under *", *2 * [less or f"whose {name} is less than *"]]),
        (">=", [f"whose {name} is at least *", f"with {name} of * or more"]),
        ("<=", [f"whose {name} is at most *", f"with {name} of * or less"]),
    ]


def number_between(table: Table, rng: random.Random) -> Condition:
    column = rng.choice(table.numbers)
    low, high = sorted(rng.sample(table.values(column)[1:], 2))
    said = [f"whose {column.spoken} is between {low} and {high}", f"with {column.spoken} from {low} to {high}"]
    return Condition(f"{column.name} BETWEEN {low} AND {high}", rng.choice(said))


def category_in(table: Table, rng: random.Random) -> Condition:
    column = rng.choice(table.categories)
    one, two = rng.sample(column.words, 2)
    said = [f"whose {column.spoken} is *", *column.phrases]
    words = rng.choice(said).replace("*", f"{one} or {two}")
    return Condition(f"{column.name} IN ({quoted(one)}, {quoted(two)})", words)


def label_like(table: Table, rng: random.Random) -> Condition:
    label, word = table.label, rng.choice(table.label.words)
    pattern, said = rng.choice([
        (f"{word[0]}%", f"starts with {word[0]}"),
        (f"%{word[-1]}", f"ends with {word[-1]}"),
        (f"%{word[1:3]}%", f"contains {word[1:3]}"),
    ])  # fmt: skip
    return Condition(f"{label.name} LIKE {quoted(pattern)}", f"whose {label.spoken} {said}")


def any_condition(table: Table, rng: random.Random) -> Condition:
    return rng.choice([category_is, number_is] if table.categories else [number_is])(table, rng)


# Kinds: which rows


def lookup(table: Table, condition: Condition, rng: random.Random) -> Question:
    text = ask_for(f"{labels_of(table, rng)} {condition.words}", rng)
    return Question(text, f"SELECT {table.label.name} FROM {table.name} WHERE {condition.sql}")


@kind
def where(world, rng):
    table = some_table(world, rng, "categories")
    return lookup(table, category_is(table, rng), rng)


@kind
def compare(world, rng):
    table = some_table(world, rng)
    return lookup(table, number_is(table, rng), rng)


@kind
def between(world, rng):
    table = some_table(world, rng)
    return lookup(table, number_between(table, rng), rng)


@kind
def one_of(world, rng):
    table = some_table(world, rng, "categories")
    return lookup(table, category_in(table, rng), rng)


@kind
def like(world, rng):
    table = some_table(world, rng)
    return lookup(table, label_like(table, rng), rng)


@kind
def two_conditions(world, rng):
    table, word = world.child, rng.choice(["and", "or"])
    first, second = category_is(table, rng), number_is(table, rng)
    both = Condition(f"{first.sql} {word.upper()} {second.sql}", f"{first.words} {word} {second.words}")
    return lookup(table, both, rng)


@kind
def above_average(world, rng):
    table = some_table(world, rng, "amounts")
    column = rng.choice(table.amounts)
    side, operator = rng.choice([("above", ">"), ("below", "<")])
    words = rng.choice([f"with {side} average {column.spoken}", f"whose {column.spoken} is {side} average"])
    average = f"(SELECT AVG({column.name}) FROM {table.name})"
    return lookup(table, Condition(f"{column.name} {operator} {average}", words), rng)


# Kinds: in which order


def direction(column: Column, rng: random.Random) -> tuple[str, str]:
    """A superlative and its order."""
    most, least = (["latest"], ["earliest"]) if column.is_date else (["highest", "largest"], ["lowest", "smallest"])
    return rng.choice([(rng.choice(most), " DESC"), (rng.choice(least), "")])


@kind
def top(world, rng):
    table = some_table(world, rng)
    column, limit = rng.choice(table.numbers), rng.randint(1, 4)
    superlative, order = direction(column, rng)
    things = table.name if limit == 1 else f"{limit} {table.plural}"
    plural = "" if limit == 1 else "s"
    text = ask_for(f"the {table.label.spoken}{plural} of the {things} with the {superlative} {column.spoken}", rng)
    if limit == 1:
        text = text.replace("What are", "What is")
    return Question(text, f"SELECT {table.label.name} FROM {table.name} ORDER BY {column.name}{order} LIMIT {limit}")


@kind
def order(world, rng):
    table = some_table(world, rng)
    column = rng.choice(table.numbers)
    words, order = rng.choice([
        (f"by descending {column.spoken}", " DESC"),
        (f"by {column.spoken} from high to low", " DESC"),
        (f"by ascending {column.spoken}", ""),
        (f"by {column.spoken} from low to high", ""),
    ])  # fmt: skip
    text = ask_for(f"{labels_of(table, rng)} {rng.choice(['sorted', 'ordered'])} {words}", rng)
    return Question(text, f"SELECT {table.label.name} FROM {table.name} ORDER BY {column.name}{order}")


# Kinds: counts and other aggregates


@kind
def count(world, rng):
    table = some_table(world, rng)
    condition = any_condition(table, rng)
    text = how_many(f"{table.plural} {condition.words}", rng)
    return Question(text, f"SELECT COUNT(*) FROM {table.name} WHERE {condition.sql}")


def some_aggregate(rng: random.Random) -> tuple[str, str]:
    """A function and the word for it."""
    return rng.choice([
        ("AVG", "average"), ("AVG", "mean"), ("SUM", "total"), ("SUM", "combined"),
        ("MAX", "highest"), ("MAX", "maximum"), ("MIN", "lowest"), ("MIN", "minimum"),
    ])  # fmt: skip


def aggregate_question(table: Table, condition: Condition | None, rng: random.Random) -> Question:
    column = rng.choice(table.amounts)
    function, word = some_aggregate(rng)
    things = f"{table.plural} {condition.words}" if condition else f"all {table.plural}"
    text = ask_for(f"the {word} {column.spoken} of {things}", rng).replace("What are", "What is")
    where_clause = f" WHERE {condition.sql}" if condition else ""
    return Question(text, f"SELECT {function}({column.name}) FROM {table.name}{where_clause}")


@kind
def aggregate(world, rng):
    return aggregate_question(some_table(world, rng, "amounts"), None, rng)


@kind
def aggregate_where(world, rng):
    table = world.child
    return aggregate_question(table, category_is(table, rng), rng)


@kind
def distinct(world, rng):
    table = some_table(world, rng, "categories")
    column = rng.choice(table.categories)
    name = column.spoken
    said = rng.choice(["different", "distinct", "unique"])
    if rng.random() < 0.5:
        text = ask_for(f"the {said} {name} values of {table.plural}", rng)
        return Question(text, f"SELECT DISTINCT {column.name} FROM {table.name}")
    text = how_many(f"{said} {name} values of {table.plural}", rng)
    return Question(text, f"SELECT COUNT(DISTINCT {column.name}) FROM {table.name}")


# Kinds: groups


@kind
def group_count(world, rng):
    table = some_table(world, rng, "categories")
    column = rng.choice(table.categories)
    text = rng.choice([
        f"Show each {column.spoken} with its number of {table.plural}.",
        f"List every {column.spoken} and how many {table.plural} it has.",
        f"For each {column.spoken}, show it and count the {table.plural}.",
    ])  # fmt: skip
    return Question(text, f"SELECT {column.name}, COUNT(*) FROM {table.name} GROUP BY {column.name}")


@kind
def group_aggregate(world, rng):
    table = some_table(world, rng, "categories", "amounts")
    column, amount = rng.choice(table.categories), rng.choice(table.amounts)
    function, word = some_aggregate(rng)
    text = rng.choice([
        f"Show each {column.spoken} with the {word} {amount.spoken} of its {table.plural}.",
        f"List every {column.spoken} and the {word} {amount.spoken} of its {table.plural}.",
        f"For each {column.spoken}, show it and the {word} {amount.spoken} of {table.plural}.",
    ])  # fmt: skip
    sql = f"SELECT {column.name}, {function}({amount.name}) FROM {table.name} GROUP BY {column.name}"
    return Question(text, sql)


@kind
def having(world, rng):
    table = some_table(world, rng, "categories")
    column, number = rng.choice(table.categories), rng.randint(1, 3)
    operator, said = rng.choice([(">", "more than"), (">=", "at least"), ("<", "fewer than")])
    number += operator != ">"
    text = rng.choice([
        f"Show each {column.spoken} that has {said} {number} {table.plural}.",
        f"List every {column.spoken} with {said} {number} {table.plural}.",
        f"Which {column.spoken} values have {said} {number} {table.plural}?",
    ])  # fmt: skip
    sql = f"SELECT {column.name} FROM {table.name} GROUP BY {column.name} HAVING COUNT(*) {operator} {number}"
    return Question(text, sql)


# Kinds: both tables


def joined(world: World) -> str:
    child, parent = world.child.name, world.parent.name
    return f"{child} JOIN {parent} ON {child}.{parent}_id = {parent}.id"


@kind
def join(world, rng):
    child, parent = world.child, world.parent
    owner, label = f"{parent.name}.", parent.label
    if rng.random() < 0.5:
        name = rng.choice(label.words)
        condition = Condition(f"{owner}{label.name} = {quoted(name)}", f"the {parent.name} {name}")
    else:
        make = rng.choice([category_is, number_is] if parent.categories else [number_is])
        condition = make(parent, rng, owner)
        condition.words = f"{parent.plural} {condition.words}"
    text = ask_for(f"the {child.label.spoken}s of {child.plural} of {condition.words}", rng)
    sql = f"SELECT {child.name}.{child.label.name} FROM {joined(world)} WHERE {condition.sql}"
    return Question(text, sql)


@kind
def join_count(world, rng):
    child, parent = world.child, world.parent
    label = f"{parent.name}.{parent.label.name}"
    text = rng.choice([
        f"Show the {parent.label.spoken} of each {parent.name} with its number of {child.plural}.",
        f"For each {parent.name}, show its {parent.label.spoken} and count its {child.plural}.",
        f"List every {parent.name} {parent.label.spoken} and how many {child.plural} it has.",
    ])  # fmt: skip
    return Question(text, f"SELECT {label}, COUNT(*) FROM {joined(world)} GROUP BY {label}")


@kind
def join_aggregate(world, rng):
    child, parent = world.child, world.parent
    label, amount = f"{parent.name}.{parent.label.name}", rng.choice(child.amounts)
    function, word = some_aggregate(rng)
    text = rng.choice([
        f"Show the {parent.label.spoken} of each {parent.name} with the {word} {amount.spoken} of its {child.plural}.",
        f"For each {parent.name}, show its {parent.label.spoken} and the {word} {amount.spoken} of its {child.plural}.",
    ])  # fmt: skip
    sql = f"SELECT {label}, {function}({child.name}.{amount.name}) FROM {joined(world)} GROUP BY {label}"
    return Question(text, sql)
