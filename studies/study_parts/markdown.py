"""The study as Markdown: words and tables, without the charts."""
from .blocks import Chart, Code, Content, Table


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(table: Table) -> list:
    lines = ["| " + " | ".join(map(_cell, table.columns)) + " |", "|" + "---|" * len(table.columns)]
    for index, row in enumerate(table.rows):
        cells = [f"**{_cell(c)}**" if index in table.marked and c else _cell(c) for c in row]
        lines.append("| " + " | ".join(cells) + " |")
    return [f"{table.caption}:" if not table.caption.endswith(".") else table.caption, "", *lines, ""]


def render(content: Content, page: str) -> str:
    """`page` is the file name of the HTML page, which has the charts."""
    lines = [f"# {content.title}", ""]
    for paragraph in [*content.lead, f"With charts: `{page}`."]:
        lines += [paragraph, ""]
    for section in content.sections:
        lines += [f"## {section.title}", ""]
        for block in section.blocks:
            if isinstance(block, Table):
                lines += _table(block)
            elif isinstance(block, Code):
                lines += ["```", block.text, "```", ""]
            elif not isinstance(block, Chart):
                lines += [block, ""]
    return "\n".join(lines).rstrip() + "\n"
