"""What all benches stand on: results files, where figures were measured, and processes that answer."""
