"""What passes the same switches, in rounds in which no port has two partners (Birkhoff 1946).

A matrix of what goes from port to port is filled up until all its rows and columns add up to the same; it is
then a sum of permutations, each of which is a round: every port sends to one other and receives from one. A
round is as long as its shortest part allows; the longest rounds are taken first, so that there are few.
"""

from __future__ import annotations

import numpy as np

from arborcast.synth.kernels.compiled import Ints, kernel

FINENESS = 128
"""Times the ports: into so many parts the longest row may be cut; what is less goes in rounds of its own."""


def decompose(amounts: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Rounds of a square matrix of whole amounts: of each entry its round, row, column and amount.

    The entries of a pair add up to its amount. In no round does a row or a column appear twice. The rounds
    together are as long as the longest row or column, but for what rest there is: about a hundredth.
    """
    ports = len(amounts)
    longest = int(max(amounts.sum(axis=0).max(), amounts.sum(axis=1).max(), 1))
    real, filler = amounts.copy(), _filler(amounts, longest)
    room = 64 * ports * (ports + longest.bit_length())
    found = np.zeros((4, room), dtype=np.int64)
    count = int(_rounds(real, filler, longest // (FINENESS * ports), found))
    first = int(found[0, count - 1]) + 1 if count else 0
    rows, columns = np.nonzero(real)
    rest = np.array([first + (columns - rows) % ports, rows, columns, real[rows, columns]])
    rounds, row, column, amount = np.concatenate([found[:, :count], rest], axis=1)
    return rounds, row, column, amount


def _filler(amounts: Ints, longest: int) -> Ints:
    """What is missing to rows and columns that are all as long as the longest."""
    filler = np.zeros_like(amounts)
    rows = (longest - amounts.sum(axis=1)).tolist()
    columns = (longest - amounts.sum(axis=0)).tolist()
    row = column = 0
    while row < len(rows) and column < len(columns):
        put = min(rows[row], columns[column])
        filler[row, column] = put
        rows[row] -= put
        columns[column] -= put
        row, column = row + (rows[row] == 0), column + (columns[column] == 0 and rows[row] != 0)
    return filler


@kernel
def _augment(both: Ints, least: int, row: int, partner: Ints, seen: Ints, mark: int) -> bool:
    """Find the row a column with at least so much, moving other rows to other columns (Kuhn 1955)."""
    for column in range(len(both)):
        if seen[column] != mark and both[row, column] >= least:
            seen[column] = mark
            if partner[column] < 0 or _augment(both, least, partner[column], partner, seen, mark):
                partner[column] = row
                return True
    return False


@kernel
def _complete(both: Ints, least: int, partner: Ints, seen: Ints, marks: Ints) -> bool:
    """Give every row a column with at least so much, starting from those that have one."""
    has_row = np.zeros(len(both), dtype=np.bool_)
    for column in range(len(both)):
        if partner[column] >= 0 and both[partner[column], column] < least:
            partner[column] = -1
        if partner[column] >= 0:
            has_row[partner[column]] = True
    for row in range(len(both)):
        if not has_row[row]:
            marks[0] += 1
            if not _augment(both, least, row, partner, seen, marks[0]):
                return False
    return True


@kernel
def _rounds(real: Ints, filler: Ints, smallest: int, found: Ints) -> int:
    """Take permutations out of both until only small amounts are left; how many entries there are."""
    ports = len(real)
    both = real + filler
    partner = np.full(ports, -1, dtype=np.int64)
    seen, marks = np.zeros(ports, dtype=np.int64), np.zeros(1, dtype=np.int64)
    least, count, turn = 1, 0, 0
    while 2 * least <= both.max():
        least *= 2
    while least > smallest:
        if not _complete(both, least, partner, seen, marks):
            least //= 2
            continue
        length = both.max()
        for column in range(ports):
            length = min(length, both[partner[column], column])
        for column in range(ports):
            row = partner[column]
            sent = min(length, real[row, column])
            if sent > 0:
                if count == found.shape[1]:
                    return count
                found[0, count], found[1, count] = turn, row
                found[2, count], found[3, count] = column, sent
                count += 1
                real[row, column] -= sent
            filler[row, column] -= length - sent
            both[row, column] -= length
        turn += 1
    return count
