class PageWriter:
    pass
