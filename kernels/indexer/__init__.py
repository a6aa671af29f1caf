"""The lightning indexer: index queries, scores, the selection of the best positions."""
