"""Pages of the site that are made from the program itself, and the files of the repository that pages link to."""
