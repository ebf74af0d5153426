"""Questions about a world, each with the SQL that answers it, in the kinds a beginner meets.

A kind is a function that draws one question. Wordings vary, but each says which columns it wants
and in what order, so that one result is right and running the SQL can tell.
"""

import random
from dataclasses import dataclass

from .worlds import Column, Table, World

KINDS = {}  # name -> function(world, rng) -> Question


def kind(draw):
    """Register a kind of question under its function's name."""
    KINDS[draw.__name__.lstrip("_")] = draw
    return draw


@dataclass
class Question:
    text: str
    sql: str


@dataclass
class _Condition:
    sql: str  # what follows WHERE: "country = 'France'"
    words: str  # what follows the noun: "from France"


# How one asks


def _ask_for(what: str, rng: random.Random, many: bool = True) -> str:
    verb = "are" if many else "is"
    openings = ["Show {}.", "List {}.", "Give {}.", "Find {}.", f"What {verb} {{}}?", "I need {}."]
    return rng.choice(openings).format(what)


def _ask_how_many(things: str, rng: random.Random) -> str:
    openings = ["How many {} are there?", "Count the {}.", "What is the number of {}?"]
    return rng.choice(openings).format(things)


def _labels_of(table: Table, rng: random.Random) -> str:
    return f"the {table.label.spoken}s of {rng.choice(['', 'all '])}{table.plural}"


def _some_table(world: World, rng: random.Random, *having: str) -> Table:
    """A table with such columns ("categories", "amounts"); mostly the child, which has more."""
    tables = [world.parent, world.child, world.child]
    return rng.choice([table for table in tables if all(getattr(table, what) for what in having)])


def _some_aggregate(rng: random.Random) -> tuple[str, str]:
    """A function and a word for it."""
    function, words = rng.choice([
        ("AVG", ["average", "mean"]),
        ("SUM", ["total", "combined"]),
        ("MAX", ["highest", "maximum"]),
        ("MIN", ["lowest", "minimum"]),
    ])  # fmt: skip
    return function, rng.choice(words)


# Conditions. `prefix` is "singer." where a join needs to say whose column it is.


def _quoted(word: str) -> str:
    return f"'{word}'"


def _category_is(table: Table, rng: random.Random, prefix: str = "") -> _Condition:
    column = rng.choice(table.categories)
    word = rng.choice(table.values(column))
    said = [f"whose {column.spoken} is *", f"with {column.spoken} *", *2 * column.phrases]
    words = rng.choice(said).replace("*", word)
    return _Condition(f"{prefix}{column.name} = {_quoted(word)}", words)


def _number_is(table: Table, rng: random.Random, prefix: str = "") -> _Condition:
    column = rng.choice(table.numbers)
    # Not at the ends, so that some rows pass and some do not.
    number = rng.choice(table.values(column)[1:-1])
    operator, said = rng.choice(_comparisons(column))
    words = rng.choice(said).replace("*", str(number))
    return _Condition(f"{prefix}{column.name} {operator} {number}", words)


def _comparisons(column: Column) -> list[tuple[str, list[str]]]:
    """Operators and the ways to say them. A phrase of the column's own is drawn more often."""
    name = column.spoken
    plain = [f"whose {name} is more than *", f"whose {name} is less than *"]
    more, less = column.phrases or plain
    return [
        (">", [f"whose {name} is above *", f"with {name} over *", more, more]),
        ("<", [f"whose {name} is below *", f"with {name} under *", less, less]),
        (">=", [f"whose {name} is at least *", f"with {name} of * or more"]),
        ("<=", [f"whose {name} is at most *", f"with {name} of * or less"]),
    ]


def _number_between(table: Table, rng: random.Random) -> _Condition:
    column = rng.choice(table.numbers)
    low, high = sorted(rng.sample(table.values(column)[1:], 2))
    name = column.spoken
    said = [f"whose {name} is between {low} and {high}", f"with {name} from {low} to {high}"]
    return _Condition(f"{column.name} BETWEEN {low} AND {high}", rng.choice(said))


def _category_in(table: Table, rng: random.Random) -> _Condition:
    column = rng.choice(table.categories)
    one, two = rng.sample(column.words, 2)
    said = [f"whose {column.spoken} is *", *column.phrases]
    words = rng.choice(said).replace("*", f"{one} or {two}")
    return _Condition(f"{column.name} IN ({_quoted(one)}, {_quoted(two)})", words)


def _label_like(table: Table, rng: random.Random) -> _Condition:
    label, word = table.label, rng.choice(table.label.words)
    pattern, said = rng.choice([
        (f"{word[0]}%", f"starts with {word[0]}"),
        (f"%{word[-1]}", f"ends with {word[-1]}"),
        (f"%{word[1:3]}%", f"contains {word[1:3]}"),
    ])  # fmt: skip
    return _Condition(f"{label.name} LIKE {_quoted(pattern)}", f"whose {label.spoken} {said}")


def _simple_condition(table: Table, rng: random.Random, prefix: str = "") -> _Condition:
    draw = rng.choice([_category_is, _number_is] if table.categories else [_number_is])
    return draw(table, rng, prefix)


# Kinds: which rows


def lookup(table: Table, condition: _Condition, rng: random.Random) -> Question:
    text = _ask_for(f"{_labels_of(table, rng)} {condition.words}", rng)
    return Question(text, f"SELECT {table.label.name} FROM {table.name} WHERE {condition.sql}")


@kind
def where(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng, "categories")
    return lookup(table, _category_is(table, rng), rng)


@kind
def compare(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng)
    return lookup(table, _number_is(table, rng), rng)


@kind
def between(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng)
    return lookup(table, _number_between(table, rng), rng)


@kind
def one_of(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng, "categories")
    return lookup(table, _category_in(table, rng), rng)


@kind
def like(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng)
    return lookup(table, _label_like(table, rng), rng)


@kind
def _two_conditions(world: World, rng: random.Random) -> Question:
    one, two = _category_is(world.child, rng), _number_is(world.child, rng)
    word = rng.choice(["and", "or"])
    both = _Condition(f"{one.sql} {word.upper()} {two.sql}", f"{one.words} {word} {two.words}")
    return lookup(world.child, both, rng)


@kind
def _above_average(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng, "amounts")
    column = rng.choice(table.amounts)
    side, operator = rng.choice([("above", ">"), ("below", "<")])
    said = [f"with {side} average {column.spoken}", f"whose {column.spoken} is {side} average"]
    sql = f"{column.name} {operator} (SELECT AVG({column.name}) FROM {table.name})"
    return lookup(table, _Condition(sql, rng.choice(said)), rng)


# Kinds: in which order


@kind
def top(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng)
    label, column, limit = table.label, rng.choice(table.numbers), rng.randint(1, 4)
    most, least = ("latest", "earliest") if column.is_date else ("highest", "lowest")
    superlative, order = rng.choice([(most, " DESC"), (least, "")])
    labels = f"{label.spoken} of the {table.name}"
    if limit > 1:
        labels = f"{label.spoken}s of the {limit} {table.plural}"
    text = _ask_for(f"the {labels} with the {superlative} {column.spoken}", rng, many=limit > 1)
    sql = f"SELECT {label.name} FROM {table.name} ORDER BY {column.name}{order} LIMIT {limit}"
    return Question(text, sql)


@kind
def order(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng)
    column = rng.choice(table.numbers)
    words, order = rng.choice([
        (f"by descending {column.spoken}", " DESC"),
        (f"by {column.spoken} from high to low", " DESC"),
        (f"by ascending {column.spoken}", ""),
        (f"by {column.spoken} from low to high", ""),
    ])  # fmt: skip
    text = _ask_for(f"{_labels_of(table, rng)} {rng.choice(['sorted', 'ordered'])} {words}", rng)
    sql = f"SELECT {table.label.name} FROM {table.name} ORDER BY {column.name}{order}"
    return Question(text, sql)


# Kinds: one value


@kind
def count(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng)
    condition = _simple_condition(table, rng)
    text = _ask_how_many(f"{table.plural} {condition.words}", rng)
    return Question(text, f"SELECT COUNT(*) FROM {table.name} WHERE {condition.sql}")


@kind
def _aggregate(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng, "amounts")
    column, (function, word) = rng.choice(table.amounts), _some_aggregate(rng)
    text = _ask_for(f"the {word} {column.spoken} of all {table.plural}", rng, many=False)
    return Question(text, f"SELECT {function}({column.name}) FROM {table.name}")


@kind
def _aggregate_where(world: World, rng: random.Random) -> Question:
    table, condition = world.child, _category_is(world.child, rng)
    column, (function, word) = rng.choice(table.amounts), _some_aggregate(rng)
    things = f"{table.plural} {condition.words}"
    text = _ask_for(f"the {word} {column.spoken} of {things}", rng, many=False)
    sql = f"SELECT {function}({column.name}) FROM {table.name} WHERE {condition.sql}"
    return Question(text, sql)


# Kinds: distinct values and groups


@kind
def _distinct(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng, "categories")
    column = rng.choice(table.categories)
    said = rng.choice(["different", "distinct", "unique"])
    things = f"{said} {column.spoken} values of {table.plural}"
    if rng.random() < 0.5:
        sql = f"SELECT DISTINCT {column.name} FROM {table.name}"
        return Question(_ask_for(f"the {things}", rng), sql)
    sql = f"SELECT COUNT(DISTINCT {column.name}) FROM {table.name}"
    return Question(_ask_how_many(things, rng), sql)


@kind
def _group_count(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng, "categories")
    column = rng.choice(table.categories)
    text = rng.choice([
        f"Show each {column.spoken} with its number of {table.plural}.",
        f"List every {column.spoken} and how many {table.plural} it has.",
        f"For each {column.spoken}, show it and count the {table.plural}.",
    ])  # fmt: skip
    name = column.name
    return Question(text, f"SELECT {name}, COUNT(*) FROM {table.name} GROUP BY {name}")


@kind
def _group_aggregate(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng, "categories", "amounts")
    column, amount = rng.choice(table.categories), rng.choice(table.amounts)
    function, word = _some_aggregate(rng)
    things = f"the {word} {amount.spoken} of its {table.plural}"
    text = rng.choice([
        f"Show each {column.spoken} with {things}.",
        f"List every {column.spoken} and {things}.",
        f"For each {column.spoken}, show it and {things}.",
    ])  # fmt: skip
    name = column.name
    sql = f"SELECT {name}, {function}({amount.name}) FROM {table.name} GROUP BY {name}"
    return Question(text, sql)


@kind
def having(world: World, rng: random.Random) -> Question:
    table = _some_table(world, rng, "categories")
    column, number = rng.choice(table.categories), rng.randint(1, 3)
    said, test = rng.choice([
        (f"more than {number}", f"> {number}"),
        (f"at least {number + 1}", f">= {number + 1}"),
        (f"fewer than {number + 1}", f"< {number + 1}"),
    ])  # fmt: skip
    text = rng.choice([
        f"Show each {column.spoken} that has {said} {table.plural}.",
        f"List every {column.spoken} with {said} {table.plural}.",
        f"Which {column.spoken} values have {said} {table.plural}?",
    ])  # fmt: skip
    name = column.name
    sql = f"SELECT {name} FROM {table.name} GROUP BY {name} HAVING COUNT(*) {test}"
    return Question(text, sql)


# Kinds: both tables


def joined(world: World) -> str:
    child, parent = world.child.name, world.parent.name
    return f"{child} JOIN {parent} ON {child}.{parent}_id = {parent}.id"


@kind
def join(world: World, rng: random.Random) -> Question:
    child, parent = world.child, world.parent
    if rng.random() < 0.5:
        name = rng.choice(parent.label.words)
        sql = f"{parent.name}.{parent.label.name} = {_quoted(name)}"
        owners = f"the {parent.name} {name}"
    else:
        condition = _simple_condition(parent, rng, f"{parent.name}.")
        sql, owners = condition.sql, f"{parent.plural} {condition.words}"
    text = _ask_for(f"the {child.label.spoken}s of {child.plural} of {owners}", rng)
    label = f"{child.name}.{child.label.name}"
    return Question(text, f"SELECT {label} FROM {joined(world)} WHERE {sql}")


@kind
def _join_count(world: World, rng: random.Random) -> Question:
    parent, children = world.parent, world.child.plural
    text = rng.choice([
        f"Show the {parent.label.spoken} of each {parent.name} with its number of {children}.",
        f"For each {parent.name}, show its {parent.label.spoken} and count its {children}.",
        f"List every {parent.name} {parent.label.spoken} and how many {children} it has.",
    ])  # fmt: skip
    label = f"{parent.name}.{parent.label.name}"
    return Question(text, f"SELECT {label}, COUNT(*) FROM {joined(world)} GROUP BY {label}")


@kind
def _join_aggregate(world: World, rng: random.Random) -> Question:
    child, parent = world.child, world.parent
    amount, (function, word) = rng.choice(child.amounts), _some_aggregate(rng)
    things = f"the {word} {amount.spoken} of its {child.plural}"
    text = rng.choice([
        f"Show the {parent.label.spoken} of each {parent.name} with {things}.",
        f"For each {parent.name}, show its {parent.label.spoken} and {things}.",
    ])  # fmt: skip
    label, value = f"{parent.name}.{parent.label.name}", f"{child.name}.{amount.name}"
    sql = f"SELECT {label}, {function}({value}) FROM {joined(world)} GROUP BY {label}"
    return Question(text, sql)
