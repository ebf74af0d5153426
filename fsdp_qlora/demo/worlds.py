"""The small databases that the demo's questions are about.

`worlds.txt` declares them in a notation made for reading; this module parses it and fills each
world with rows from a seed. A world is two tables, where each row of the second (`child`) belongs
to a row of the first (`parent`).
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

WORLDS_FILE = Path(__file__).with_name("worlds.txt")


@dataclass
class Column:
    name: str
    words: list[str]  # the values of a column of words; empty for a column of numbers
    span: tuple[int, int] | None  # lowest and highest value of a column of numbers
    phrases: list[str]  # how one says a condition on it: ["from *"], ["older than *", "younger than *"]

    @property
    def spoken(self) -> str:
        return self.name.replace("_", " ")

    @property
    def is_date(self) -> bool:
        """A year: one may ask for the latest, but not for the average or the sum."""
        return self.phrases[:1] != [] and "after" in self.phrases[0]


@dataclass
class Table:
    name: str
    plural: str
    columns: list[Column]
    parent: "Table | None" = None
    rows: list[tuple] = ()

    @property
    def label(self) -> Column:
        """The column that names a row: a singer's name, a song's title."""
        return self.columns[0]

    @property
    def categories(self) -> list[Column]:
        return [column for column in self.columns[1:] if column.words]

    @property
    def numbers(self) -> list[Column]:
        return [column for column in self.columns if column.span]

    @property
    def amounts(self) -> list[Column]:
        return [column for column in self.numbers if not column.is_date]

    @property
    def all_column_names(self) -> list[str]:
        link = [f"{self.parent.name}_id"] if self.parent else []
        return ["id", *(column.name for column in self.columns), *link]

    def values(self, column: Column) -> list:
        """What the rows hold in a column, sorted."""
        position = self.all_column_names.index(column.name)
        return sorted(row[position] for row in self.rows)


@dataclass
class World:
    name: str
    split: str  # "training" or "held out"
    parent: Table
    child: Table

    @property
    def tables(self) -> list[Table]:
        return [self.parent, self.child]

    def notation(self) -> str:
        """The schema as the model reads it, a table a line: `singer(id, name, country, age)`."""
        return "\n".join(f"{t.name}({', '.join(t.all_column_names)})" for t in self.tables)

    def sql(self) -> str:
        """CREATE TABLE and INSERT statements that rebuild the world in sqlite."""
        return "\n".join(line for table in self.tables for line in table_sql(table))


def table_sql(table: Table) -> list[str]:
    names = ", ".join(table.all_column_names)
    rows = ", ".join(str(row) for row in table.rows)
    return [f"CREATE TABLE {table.name} ({names});", f"INSERT INTO {table.name} VALUES {rows};"]


def read_worlds(seed: int, text: str | None = None) -> list[World]:
    """Every declared world, filled with rows that depend on the seed and its own name only."""
    text = text or WORLDS_FILE.read_text()
    shared, split, worlds = {}, None, []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if line.startswith("$"):
            name, values = line.split(":")
            shared[name] = values
        elif line.startswith("=="):
            split = line.strip("= ")
        elif line.startswith("["):
            worlds.append(World(line.strip("[]"), split, None, None))
        elif line.startswith(" "):
            (worlds[-1].child or worlds[-1].parent).columns.append(read_column(line, shared))
        else:
            add_table(worlds[-1], *line.split(" / "))
    for world in worlds:
        fill(world, random.Random(f"{seed} {world.name}"))
    return worlds


def add_table(world: World, name: str, plural: str):
    if world.parent is None:
        world.parent = Table(name, plural, [])
    else:
        world.child = Table(name, plural, [], parent=world.parent)


def read_column(line: str, shared: dict[str, str]) -> Column:
    """Parse `name (phrase / phrase): word, word` or `name: 1..9`."""
    name, phrases, values = re.fullmatch(r" +(\w+)(?: \((.*)\))?: (.*)", line).groups()
    phrases = phrases.split(" / ") if phrases else []
    if ".." in values:
        low, high = values.split("..")
        return Column(name, [], (int(low), int(high)), phrases)
    words = [word.strip() for word in shared.get(values, values).split(",")]
    return Column(name, words, None, phrases)


def fill(world: World, rng: random.Random):
    """Draw the rows. Numbers differ within a column, so that no ORDER BY has ties."""
    for table in world.tables:
        count = len(table.label.words)
        drawn = [range(1, count + 1), *(draw_column(table, column, count, rng) for column in table.columns)]
        if table.parent:
            # Each parent has at least one child, so that an inner and a left join agree.
            parents = range(1, len(table.parent.rows) + 1)
            links = [*parents, *rng.choices(parents, k=count - len(parents))]
            drawn.append(rng.sample(links, count))
        table.rows = list(zip(*drawn, strict=True))


def draw_column(table: Table, column: Column, count: int, rng: random.Random) -> list:
    if column is table.label:
        return column.words
    if column.words:
        return rng.choices(column.words, k=count)
    low, high = column.span
    return rng.sample(range(low, high + 1), count)
