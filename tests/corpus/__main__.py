"""Answers the corpus anew: `python -m tests.corpus [--write] [WORD ...]`.

Names each question whose answer is not the one in `answers.json`, and ends with status 1 if there is one.
WORDs choose the questions that hold all of them. With `--write` these answers are written, once the verifier
has nothing against them; the commit says why they changed.
"""

from __future__ import annotations

import json
import os
import sys

from tests.corpus.answering import ANSWERS, answer, answers, questions


def seconds() -> float:
    """Of processors, used by this process and the solvers that it started."""
    return sum(os.times()[:4])


def main(words: list[str]) -> int:
    """Answer those questions that hold all words."""
    write = "--write" in words
    chosen = {word for word in words if word != "--write"}
    digests = answers() if ANSWERS.exists() else {}
    asked = [question for question in questions() if chosen <= set(question.split())]
    changed = 0
    for question in asked:
        start = seconds()
        found = answer(question)
        state = "same" if found.digest == digests.get(question) else "changed"
        changed += state == "changed"
        digests[question] = found.digest
        print(f"{seconds() - start:7.2f} s  {state:7}  {question}", flush=True)
        if write and (objections := found.objections()):
            print(*objections, sep="\n")
            return 1
    print(f"{len(asked)} questions in {seconds():.0f} s, {changed} of them with another answer")
    if write:
        kept = {question: digests[question] for question in questions() if question in digests}
        ANSWERS.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if write else int(changed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
