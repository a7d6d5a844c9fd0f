"""What the testbed runs on emulated links: cases, contenders, ranks, rows."""
