"""Page: what people look at after a benchmark: plots, tables for papers, one HTML file.

Everything is made from benchmark.json and the traces beside it, so it can be made again at any
time; a file that lacks newer figures shows what it has. No network is needed to read the result.
"""

from inference.page.files import NO_PLOTS, write_page

__all__ = ["NO_PLOTS", "write_page"]
