"""The small databases that the demo's questions are about.

`worlds.txt` declares them in a notation made for reading; this module parses it and fills each
world with rows from a seed. A world is two tables, where each row of the second (`child`) belongs
to a row of the first (`parent`).
"""

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

_WORLDS_FILE = Path(__file__).with_name("worlds.txt")


@dataclass
class Column:
    name: str
    words: list[str]  # the values of a column of words; empty for a column of numbers
    span: tuple[int, int] | None  # lowest and highest value of a column of numbers
    phrases: list[str]  # how one says a condition: "from *", or "older than *" and "younger than *"

    @property
    def spoken(self) -> str:
        return self.name.replace("_", " ")

    @property
    def is_date(self) -> bool:
        """A year: one may ask for the latest, but not for the average or the sum."""
        return any("after *" in phrase for phrase in self.phrases)


@dataclass
class Table:
    name: str
    plural: str
    columns: list[Column]
    parent: "Table | None" = None
    rows: list[tuple] = field(default_factory=list)  # in the order of `column_names`

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
    def column_names(self) -> list[str]:
        link = [f"{self.parent.name}_id"] if self.parent else []
        return ["id", *(column.name for column in self.columns), *link]

    def values(self, column: Column) -> list:
        """What the rows hold in a column, sorted."""
        position = self.column_names.index(column.name)
        return sorted(row[position] for row in self.rows)

    def sql(self) -> str:
        names, rows = ", ".join(self.column_names), ", ".join(map(str, self.rows))
        return f"CREATE TABLE {self.name} ({names});\nINSERT INTO {self.name} VALUES {rows};"


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
        return "\n".join(f"{table.name}({', '.join(table.column_names)})" for table in self.tables)

    def sql(self) -> str:
        """CREATE TABLE and INSERT statements that rebuild the world in sqlite."""
        return "\n".join(table.sql() for table in self.tables)


def read_worlds(seed: int) -> list[World]:
    """Every declared world, filled with rows that depend on the seed and its own name only."""
    text = _WORLDS_FILE.read_text()
    shared = dict(re.findall(r"(?m)^\$(\w+): (.*)$", text))
    _, *sections = re.split(r"(?m)^== (.*) ==$", Template(text).safe_substitute(shared))
    worlds = [
        _read_world(name, split, block)
        for split, section in zip(sections[::2], sections[1::2], strict=True)
        for name, block in re.findall(r"(?m)^\[(\w+)\]\n((?:.+\n)+)", section)
    ]
    for world in worlds:
        fill(world, random.Random(f"{seed} {world.name}"))
    return worlds


def _read_world(name: str, split: str, block: str) -> World:
    """Parse two tables, each a line that is not indented and the indented lines below it."""
    first, second = re.split(r"\n(?=\w)", block.strip())
    parent = _read_table(first)
    return World(name, split, parent, _read_table(second, parent))


def _read_table(text: str, parent: Table | None = None) -> Table:
    head, *lines = text.splitlines()
    name, plural = head.split(" / ")
    return Table(name, plural, [_read_column(line) for line in lines], parent)


def _read_column(line: str) -> Column:
    """Parse `name (phrase / phrase): word, word` or `name: 1..9`."""
    name, phrases, values = re.fullmatch(r" +(\w+)(?: \((.*)\))?: (.*)", line).groups()
    phrases = phrases.split(" / ") if phrases else []
    if ".." in values:
        low, high = map(int, values.split(".."))
        return Column(name, [], (low, high), phrases)
    return Column(name, values.split(", "), None, phrases)


def fill(world: World, rng: random.Random):
    """Draw the rows of both tables."""
    for table in world.tables:
        count = len(table.label.words)
        drawn = [_draw_column(table, column, count, rng) for column in table.columns]
        if table.parent:
            drawn.append(_draw_links(len(table.parent.rows), count, rng))
        table.rows = list(zip(range(1, count + 1), *drawn, strict=True))


def _draw_column(table: Table, column: Column, count: int, rng: random.Random) -> list:
    """Values of a column. Numbers differ from row to row, so that no ORDER BY has ties."""
    if column is table.label:
        return column.words
    if column.words:
        return rng.choices(column.words, k=count)
    low, high = column.span
    return rng.sample(range(low, high + 1), count)


def _draw_links(parents: int, count: int, rng: random.Random) -> list[int]:
    """Ids of parents. Each has at least one child, so that inner and left joins agree."""
    links = [*range(1, parents + 1), *rng.choices(range(1, parents + 1), k=count - parents)]
    return rng.sample(links, count)
