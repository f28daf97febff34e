// The source of the targets that hold the precompiled headers (cmake/StrettoPrecompiled.cmake).
