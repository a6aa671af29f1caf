class Load:
    pages: int | None = None


class PageReader:
    def __init__(self, folder):
        pass
