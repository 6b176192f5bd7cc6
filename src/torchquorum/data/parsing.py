"""Parses many tf.train.Examples at a time into batches.

Called by `tfrecords` and by users. Examples of one data set mostly have the same layout: the same features in the same order,
so that only the bytes of the values differ. The first record of a length is parsed byte by byte and becomes a template; all
other records of that length are compared with it at once, and their values are taken as columns of a matrix. Records that do
not match are parsed one by one. What always holds: both ways give the same values and refuse the same records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from torchquorum.data.columns import Bytes, Column, Ints, RowError, join_columns, make_column
from torchquorum.data.features import Spec, Specs, check_specs
from torchquorum.errors import ConfigError
from torchquorum.formats.example import Scanned, scan
from torchquorum.formats.protobuf import ExampleError

_FEWEST_ALIKE = 4  # a template for fewer rows costs more than it saves
_TEMPLATES_PER_LENGTH = 4
_MOST_LENGTHS = 64
_MOST_TRIALS = 64  # after so many templates that matched nothing else, no more are made


class _Template:
    """The common bytes of records of one layout, and where their values are."""

    def __init__(self, record: bytes, found: Mapping[str, Scanned], wanted: Mapping[str, Spec]) -> None:
        mask = np.full(len(record), 255, np.uint8)
        first = np.frombuffer(record, np.uint8)
        self.found: dict[str, Scanned | None] = {name: found.get(name) for name in wanted}
        self.ints: dict[str, Ints] = {}
        for name, (kind, pieces, packed) in found.items():
            # For varints the bits that mark their ends must agree, unless the values are not read.
            ends_matter = kind == "int64_list" and (name in wanted or not packed)
            for start, end in pieces:
                mask[start:end] = 128 if ends_matter else 0
            if kind == "int64_list" and name in wanted:
                self.ints[name] = Ints(join_columns(first[np.newaxis], pieces)[0])
        self._columns = np.flatnonzero(mask)
        self._mask = mask[self._columns]
        self._expected = first[self._columns] & self._mask

    def match(self, matrix: Bytes) -> Any:
        """Tells which rows look like this, each row by itself."""
        return ((matrix[:, self._columns] & self._mask) == self._expected).all(axis=1)


class BatchParser:
    """Parses batches of records by one set of specifications. Used by one thread.

    Args:
        features: What to take from each example.

    Raises:
        ConfigError: The specifications make no sense.
    """

    def __init__(self, features: Specs) -> None:
        self._specs = check_specs(features)
        self._templates: dict[int, list[_Template]] = {}
        self._trials = 0

    def parse(self, records: Sequence[bytes]) -> dict[str, Any]:
        """Returns the batch: of each feature a tensor, or a list where that cannot be.

        Raises:
            RowError: A record is no example or not of this kind; its row is told.
        """
        columns = {name: make_column(name, spec, len(records)) for name, spec in self._specs.items()}
        for row in self._fill_alike(records, columns):
            self._put(row, records[row], columns)
        return {name: column.finish() for name, column in columns.items()}

    def parse_one(self, record: bytes) -> dict[str, Any]:
        """Returns one example, without a first dimension.

        Raises:
            RowError: The record is no example or not of this kind.
        """
        columns = {name: make_column(name, spec, 1) for name, spec in self._specs.items()}
        self._put(0, record, columns)
        return {name: column.finish()[0] for name, column in columns.items()}

    def _put(self, row: int, record: bytes, columns: Mapping[str, Column]) -> None:
        try:
            found = scan(record) or {}
        except ExampleError as error:
            raise RowError(row, str(error)) from None
        for name, column in columns.items():
            column.put(row, record, found.get(name))

    def _fill_alike(self, records: Sequence[bytes], columns: Mapping[str, Column]) -> list[int]:
        """Fills the rows that match a template; returns the others."""
        lengths = list(map(len, records))
        if len(set(lengths)) == 1:
            return self._fill_length(lengths[0], slice(None), records, columns)
        groups: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            groups.setdefault(length, []).append(row)
        left: list[int] = []
        for length, rows in groups.items():
            left += self._fill_length(length, rows, [records[row] for row in rows], columns)
        return sorted(left)

    def _fill_length(
        self, length: int, rows: list[int] | slice, records: Sequence[bytes], columns: Mapping[str, Column]
    ) -> list[int]:
        numbers = np.arange(len(records)) if isinstance(rows, slice) else np.array(rows)
        if len(records) < _FEWEST_ALIKE or length == 0:
            return numbers.tolist()
        matrix = np.frombuffer(b"".join(records), np.uint8).reshape(len(records), length)
        for template in self._templates.get(length, ()):
            if len(numbers) == 0:
                break
            rows, numbers, matrix = self._fill_matching(template, rows, numbers, matrix, columns)
        if len(numbers) >= _FEWEST_ALIKE and (template := self._make_template(matrix[0].tobytes())):
            before = len(numbers)
            rows, numbers, matrix = self._fill_matching(template, rows, numbers, matrix, columns)
            if before - len(numbers) >= _FEWEST_ALIKE:
                self._keep(length, template)
            else:
                self._trials += 1
        return numbers.tolist()

    def _fill_matching(
        self, template: _Template, rows: Any, numbers: Any, matrix: Bytes, columns: Mapping[str, Column]
    ) -> tuple[Any, Any, Bytes]:
        """Fills the rows that match; returns the remaining rows, their numbers and the matrix."""
        alike = template.match(matrix)
        everything = bool(alike.all())
        chosen, part = (rows, matrix) if everything else (numbers[alike], matrix[alike])
        if len(part):
            for name, column in columns.items():
                found = template.found[name]
                if found is None or found[0] is None:
                    for row in numbers[alike].tolist():
                        column.put(row, b"", None)
                else:
                    column.fill(chosen, part, found, template.ints.get(name))
        if everything:
            return [], numbers[:0], matrix[:0]
        return numbers[~alike], numbers[~alike], matrix[~alike]

    def _make_template(self, record: bytes) -> _Template | None:
        """Makes a template of a record that matches the specifications; returns None for another one."""
        if len(self._templates.get(len(record), ())) >= _TEMPLATES_PER_LENGTH or self._trials >= _MOST_TRIALS:
            return None
        try:
            found = scan(record) or {}
            for name, spec in self._specs.items():
                trial = make_column(name, spec, 1)
                trial.put(0, record, found.get(name))
                trial.finish()
            template = _Template(record, found, self._specs)
        except ExampleError:
            return None  # parsing it alone reports the error
        return template

    @property
    def num_templates(self) -> int:
        """Returns how many templates are kept."""
        return sum(map(len, self._templates.values()))

    def _keep(self, length: int, template: _Template) -> None:
        if len(self._templates) >= _MOST_LENGTHS:
            self._templates.clear()
        self._templates.setdefault(length, []).append(template)


def parse_single_example(serialized: bytes, features: Specs) -> dict[str, Any]:
    """Returns the features of one serialized example, as tf.io.parse_single_example.

    Raises:
        ExampleError: The bytes are not an example, or a feature does not match its specification.
        ConfigError: The specifications are not valid.
    """
    _check_record(serialized)
    return BatchParser(features).parse_one(serialized)


def parse_example(serialized: Sequence[bytes], features: Specs) -> dict[str, Any]:
    """Returns the features of several serialized examples as one batch, as tf.io.parse_example.

    Raises:
        ExampleError: A record is not an example, or a feature does not match its specification.
        ConfigError: The specifications are not valid.
    """
    for record in serialized:
        _check_record(record)
    return BatchParser(features).parse(list(serialized))


def _check_record(record: Any) -> None:
    if not isinstance(record, bytes):
        raise ConfigError(f"a serialized example is bytes, not {type(record).__name__}")
