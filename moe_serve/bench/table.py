"""A table in Markdown that also reads well on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


class Table:
    """The first column is text, the others are numbers, to the right."""

    def __init__(self, header: Sequence[str], num_text_columns: int = 1) -> None:
        self._rows = [list(header)]
        self._num_text_columns = num_text_columns

    def add(self, *cells: object) -> None:
        assert len(cells) == len(self._rows[0]), f"{len(cells)} cells, not {len(self._rows[0])}"
        self._rows.append([str(cell) for cell in cells])

    def __str__(self) -> str:
        # Two at least: the rule below a number needs a dash and a colon.
        widths = [max(2, *map(len, column)) for column in zip(*self._rows, strict=True)]
        rules = [
            "-" * width if index < self._num_text_columns else "-" * (width - 1) + ":"
            for index, width in enumerate(widths)
        ]
        lines = [self._line(row, widths) for row in self._rows]
        lines.insert(1, "| " + " | ".join(rules) + " |")
        return "\n".join(lines)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        cells = [
            cell.ljust(width) if index < self._num_text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(cells) + " |"
