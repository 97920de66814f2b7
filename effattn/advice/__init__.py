"""The adviser: which mechanism suits a case, and pages about mechanisms.

`effattn.advise` ranks the mechanisms for a length (see `effattn.advice.ranking`), and
`python -m effattn` lists mechanisms, shows one, and advises on the command line.
"""
