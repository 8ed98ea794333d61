def check_singleton(size, library, environ): pass
