"""Results for people and for other programs: terminal tables, files and plots. Knows no model.

`table.show` prints, `export.export` and `export.render` write tables, `plots.plot` draws. Nothing
is imported here, so that a program that wants one of them does not pay for the others.
"""
