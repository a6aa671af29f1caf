"""Every kernel at production sizes: operations with their inputs and alternatives (``cases_*``), their list
(``cases``) and the timing of one (``bench``)."""
