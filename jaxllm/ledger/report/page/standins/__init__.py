"""Small stand-ins for the parts of Python's library and of JAX that the closed forms use, for the browser.

They run first in the page, as one program (`page.sources`). Trees, dataclasses and caches behave like the originals as
far as the closed forms need. Any other name can be imported, called as a decorator, and combined with others, but has
no value to compute with, so it cannot produce a wrong figure silently.
"""
