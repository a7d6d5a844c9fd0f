"""The page of all results, a file for each of its sections: values first, HTML and Markdown at the end."""
