"""Every kernel at production sizes: the operations with their inputs and what a user would otherwise call
(``cases_*``), their list (``cases``) and how one is measured (``bench``)."""
