"""The library of C++ kernels: bundled with the package, or built with this machine's compiler."""
