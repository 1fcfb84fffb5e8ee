"""A recipe as a program: the file found, its command line read and explained, its ranks placed, its end as an exit code."""
