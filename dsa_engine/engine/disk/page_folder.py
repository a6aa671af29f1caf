class PageFolder:
    pass
