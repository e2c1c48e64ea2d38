#!/bin/sh
# Installs cuengine from /src into /opt/cuengine, a virtual environment, and takes away what never runs there.
# Called by the Dockerfiles, which the images are described in.
#
#     install.sh EXTRA            of pyproject.toml's extras, with commas, or nothing
#     install.sh --without-nvrtc  takes NVRTC and CUDA's headers away again
set -eu

target=/opt/cuengine
pip=$target/bin/pip

if [ "$1" = --without-nvrtc ]; then
    $pip list --format=freeze | sed -n 's/^\(nvidia-cuda-\(nvrtc\|runtime\)[^=]*\)=.*/\1/p' | xargs $pip uninstall -qy
    exit
fi

# pip only warns of an extra that there is not.
for extra in $(echo "$1" | tr , ' '); do
    if ! grep -q "^$extra = \[" /src/pyproject.toml; then
        echo "install.sh: pyproject.toml has no extra $extra" >&2
        exit 2
    fi
done

python3 -m venv $target
# From wheels alone, but for cuengine itself: there is no compiler here.
$pip install --only-binary=:all: -c /src/deploy/docker/constraints.txt "/src${1:+[$1]}"
site=$($target/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# Tests, and types for checkers.
find "$site" -depth -type d -name tests -exec rm -r {} +
find "$site" -name '*.pyi' -delete

if [ -d "$site/cupy" ]; then
    # What CuPy itself would compile and sort with. cuengine has its own kernels, and takes memory, streams,
    # graphs and launches from CuPy, which finds without thrust that there is none.
    rm -r "$site"/cupy/_core/include "$site"/cupy/cuda/thrust.*.so
    # An alternative build of NVRTC, which nothing here loads; and what only linkers read.
    find "$site/nvidia" \( -name '*.alt.so*' -o -name '*.a' \) -delete
    # cuBLAS under Fortran's names.
    find "$site/nvidia" -name 'libnvblas.so*' -delete
fi
