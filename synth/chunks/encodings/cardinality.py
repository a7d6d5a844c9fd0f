"""Clauses, and counting in them: how sums and orders are said to a solver that knows only "or" and "not".

A literal is a nonzero integer, its negation the negative, a clause a list of them, as in the DIMACS format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import TypeVar

FEW = 6
"""So many literals exclude each other pair by pair; more by counting."""

AnyLiteral = TypeVar("AnyLiteral")


class Clauses:
    """A formula: all of its clauses hold.

    Attributes:
        clauses: lists of literals.
        variables: how many there are, numbered from 1.
    """

    def __init__(self) -> None:
        self.clauses: list[list[int]] = []
        self.variables = 0

    def new(self) -> int:
        """A literal of a new variable."""
        self.variables += 1
        return self.variables

    def add(self, *literals: int) -> None:
        """At least one of these is true; with none, the formula cannot hold."""
        self.clauses.append(list(literals))

    def count(self, literals: Sequence[int], most: int) -> list[int]:
        """Literals of which the k-th (from 0) is true where more than k of those given are, for k < `most`.

        The converse is not said: a bound forbids outputs, which forbids inputs. One count serves bounds of
        every size. A literal may be listed several times and counts as often.

        Source: the sequential counter of Sinz (CP 2005), of which it is one half.
        """
        counted: list[int] = []
        for literal in literals:
            more = [self.new() for _ in range(min(len(counted) + 1, most))]
            for before, after in zip(counted, more, strict=False):
                self.add(-before, after)
            for number, after in enumerate(more):
                if number == 0:
                    self.add(-literal, after)
                else:
                    self.add(-literal, -counted[number - 1], after)
            counted = more
        return counted

    def at_most(self, literals: Sequence[int], most: int) -> None:
        """No more than `most` of these are true."""
        if len(literals) > most:
            self.add(-self.count(literals, most + 1)[most])

    def at_most_one(self, literals: Sequence[int]) -> None:
        """No two of these are true."""
        if len(literals) > FEW:
            self.at_most(literals, 1)
            return
        for first, second in combinations(literals, 2):
            self.add(-first, -second)

    def put_in_order(self, numbers: Iterable[Sequence[int]]) -> None:
        """Of numbers in base two, given by literals, none is larger than the one before it."""
        for first, second in pairwise(numbers):
            for clause in not_before(first, second, negate=int.__neg__, new=self.new):
                self.add(*clause)


class RoundLiterals:
    """The rounds of each step: at least one each, and a step carries no more than they allow.

    Attributes:
        longer: for each step, literals of which the k-th says that it has more than k + 1 rounds.
    """

    def __init__(self, clauses: Clauses, steps: int, spare: int, most: int) -> None:
        """Allow no more than `steps` + `spare` rounds in all, and no more than `most` in a step."""
        self._clauses = clauses
        self._spare = spare
        if spare < 0:
            clauses.add()  # fewer rounds than steps
        self.longer = [[clauses.new() for _ in range(most - 1)] for _ in range(steps)]
        for step in self.longer:
            for less, more in pairwise(step):
                clauses.add(-more, less)
        clauses.at_most([literal for step in self.longer for literal in step], max(spare, 0))

    def fit(self, step: int, literals: Sequence[int], capacity: int) -> None:
        """More literals than `capacity` times so many rounds make the step longer than that."""
        longer = self.longer[step]
        if len(literals) <= capacity:
            return
        counted = self._clauses.count(literals, capacity * (len(longer) + 1) + 1)
        for rounds, overfull in enumerate(counted[capacity::capacity]):
            self._clauses.add(-overfull, *longer[rounds : rounds + 1])

    def read(self, true: Collection[int]) -> tuple[int, ...]:
        """The rounds of each step in a model, all of those allowed."""
        rounds = [1 + sum(literal in true for literal in longer) for longer in self.longer]
        rounds[0] += len(rounds) + self._spare - sum(rounds)  # nobody minds a longer step
        return tuple(rounds)


def not_before(
    first: Sequence[AnyLiteral],
    second: Sequence[AnyLiteral],
    *,
    negate: Callable[[AnyLiteral], AnyLiteral],
    new: Callable[[], AnyLiteral],
) -> Iterator[list[AnyLiteral]]:
    """Clauses that say: read as numbers in base two, the first is at least the second.

    Args:
        first: literals, the most significant first.
        second: as many.
        negate: the negation of a literal.
        new: makes a new variable.
    """
    different: list[
        AnyLiteral
    ] = []  # a literal that is false only where all before are equal; at first, none
    last = len(first) - 1
    for position, (here, there) in enumerate(zip(first, second, strict=True)):
        yield [*different, here, negate(there)]
        if position < last:
            equal = new()
            # Given the clause above, they are equal unless the first alone is true.
            yield [*different, here, equal]
            yield [*different, negate(there), equal]
            different = [negate(equal)]
