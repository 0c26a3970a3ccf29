"""HTML of reports: one self-contained file, light and dark, without scripts or network access.

blocks      parts of a page as plain data: paragraphs, tables, figures
charts      histograms, lines over layers, bars
images      images and maps as data URIs, and panels that draw them
formatting  numbers as text
render      blocks to HTML, with the Jinja templates in ``templates`` and ``style.css``
"""
