"""Answers that are found once and kept: prices of links, of collectives, of stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import TypeVar

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")


def kept(answers: MutableMapping[Question, Answer], question: Question, find: Callable[[], Answer]) -> Answer:
    """What is known of a question; else it is found, and known from then on."""
    if question not in answers:
        answers[question] = find()
    return answers[question]
