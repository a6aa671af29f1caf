"""``python -m dsa_engine`` is the ``dsa-engine`` command; so is ``torchrun -m dsa_engine``."""

from dsa_engine.cli import main

if __name__ == "__main__":
    main()
