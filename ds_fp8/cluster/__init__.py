"""Running a job on many hosts: launching it, comparing its hosts, and ending it everywhere when it cannot go on.

A tool of the recipe, like `train`; the core never imports it.
"""
