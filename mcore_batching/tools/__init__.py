"""For people: the command line, reports, pictures, comparison with others' rules."""
