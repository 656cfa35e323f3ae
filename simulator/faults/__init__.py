"""Small worlds full of faults: drawn, brought about, checked and judged."""
