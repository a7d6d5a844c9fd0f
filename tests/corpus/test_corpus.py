"""The corpus: answers of the whole product keep their bytes, unless whoever changes them says why.

`python -m tests.corpus --write` makes `answers.json` anew.
"""

from __future__ import annotations

import pytest

from tests.corpus.answering import answer, answers, questions

ASKED = [
    pytest.param(question, id=question, marks=() if always else pytest.mark.long)
    for question, always in questions().items()
]


@pytest.mark.parametrize("question", ASKED)
def test_answers_have_the_bytes_that_they_had(question: str) -> None:
    assert answer(question).digest == answers()[question]


def test_every_answer_has_its_question() -> None:
    assert list(answers()) == list(questions())
    assert len(questions()) >= 200
