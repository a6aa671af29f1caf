class HostPages:
    pass
