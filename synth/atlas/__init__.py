"""The atlas: what is known of one machine on one page, and an index of many.

`figures` works out what a page says and keeps it as a document, `curve` and `page` draw it. The figures are
kept and the page is made of them anew, so that a change of its looks needs no new solves.
"""
