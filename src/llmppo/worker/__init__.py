"""A resident process that has the libraries imported and base models loaded, and forks for each stage.

A cold stage spends most of its start on imports. The first stage of a workflow that needs a model starts a
worker (`client`), which stays single-threaded and forks a child for each request (`server`), so that no
state leaks from one stage to the next. Client and worker meet at a socket (`place`) that belongs to one
Snakemake process, one state of the code and one environment. Whatever keeps them from meeting ends in a
cold stage, never in an error.
"""
