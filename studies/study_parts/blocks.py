"""What a page and its Markdown are made of, without layout."""
from dataclasses import dataclass, field


@dataclass
class Table:
    caption: str
    columns: list
    rows: list  # lists of text
    marked: set = field(default_factory=set)  # indices of rows that stand out


@dataclass
class Chart:
    title: str
    svg: str


@dataclass
class Code:
    text: str


@dataclass
class Section:
    title: str
    blocks: list  # str is a paragraph


@dataclass
class Content:
    title: str
    lead: list
    sections: list
