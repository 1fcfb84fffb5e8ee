"""Where rows come from: files, the Hub, mixtures, held-out rows."""
