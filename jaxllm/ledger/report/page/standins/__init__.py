"""What the closed forms use of Python's library and of JAX, small: for the browser, where neither is at hand.

They run first in the page, as one program (`page.sources`). Trees, dataclasses and caches do what the originals do, as
far as the closed forms go; a name of anything else may be imported, called as a decorator, and combined with others,
and has no value to compute with, so that a figure cannot come out of it unnoticed.
"""
