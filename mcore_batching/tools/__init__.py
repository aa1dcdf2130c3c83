"""What people use: the command line, reports, pictures, comparison with others' rules."""
