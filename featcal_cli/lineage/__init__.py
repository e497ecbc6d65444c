"""Find a merged model's base, its experts and their data from the files of its repo."""
