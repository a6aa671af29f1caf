"""One address in front of several servers of the same model (``dsa-engine route``).

The router passes requests of OpenAI's API on to any servers that speak it, byte by byte. A request goes to the replica
that has its prefix, unless that one is more loaded than the others by more than the hit is worth: ``rule.py``. The
router needs no tokenizer: prefixes are digests of blocks of a prompt's text or token ids (``prompts.py``,
``prefix_map.py``), and a text's tokens are estimated from its bytes.

* **Health.** Every replica is asked ``/ready``, or ``/health`` where there is no ``/ready``, every
  ``--health-check-interval`` seconds. One that answers with an error gets no new requests. One that cannot be reached
  is dead: its cache counts as lost. Either is used again as soon as it answers well.
* **Retries.** Until the first byte of a response, a request goes on to the next best replica if the connection fails or
  the replica answers 429, 502 or 503. If a connection breaks after the request was sent, there is a single retry: the
  request itself may be what ends its replicas. After the first byte nothing is retried; the stream ends with an error
  event.
* **Draining.** A replica that shuts down says so in ``/ready``, gets no new requests and ends those it has: SIGTERM to
  a replica is enough. ``PUT /workers/NUMBER`` with ``{"draining": true}`` does the same from the router's side, and
  ``false`` undoes it; ``GET /workers`` lists states and loads. Both answer only on the router's own machine.
* **The end.** SIGTERM or Ctrl-C: ``/ready`` and new requests get 503, running ones have ``--shutdown-timeout``.
* **Keys.** Clients' ``Authorization`` is passed on. With ``--api-key`` the router checks it too.

``/health`` says that the router runs, ``/ready`` that it has a replica to send to, ``/metrics`` what it does.
"""
