"""Extensions of Sphinx for the site: pages made from the package, and links between files."""
