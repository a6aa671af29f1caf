"""The command dsa-engine on several ranks: torchrun … command.py generate|chat …"""

from dsa_engine.cli import main

main()
