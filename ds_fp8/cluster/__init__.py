"""Jobs of several ranks: started on many hosts, compared, and ended everywhere when they cannot go on."""
