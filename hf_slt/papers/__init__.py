"""Both papers as programs: arXiv 2511.04217 (attention by pruning) and arXiv 2410.10986 (its Hessian).

Nothing else in the package depends on this folder.
"""
