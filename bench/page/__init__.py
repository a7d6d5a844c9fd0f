"""The page of all results: tables as values, what is shown (`sections`), how it looks."""
