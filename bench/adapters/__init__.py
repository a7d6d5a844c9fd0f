"""Other synthesizers, run from checkouts of yours: questions in their terms, answers as schedules of ours."""
