#!/bin/sh
# Installs the Python that runs our own programs: /usr/lib/provisioner/python3, a copy of the system's with the part of
# the standard library that such programs need, and compiles them. Whatever a family does to Debian's Python or to
# /usr/local, with apt, pip or an editor, this one stays as it is; only libc is shared. Usage: runtime.sh TREE
set -eu
tree=${1%/}
home=/usr/lib/provisioner
python=$(chroot "$tree/" readlink -f /usr/bin/python3)
version=${python##*/}

mkdir -p "$tree$home/bin" "$tree$home/lib"
cp -p "$tree$python" "$tree$home/bin/"
# Programs and tests, what is large, and what needs further libraries.
tar -C "$tree/usr/lib" -c \
    --exclude="$version/config-*" --exclude="$version/EXTERNALLY-MANAGED" --exclude="$version/sitecustomize.py" \
    --exclude="$version/curses" --exclude="$version/dbm" --exclude="$version/distutils" \
    --exclude="$version/ensurepip" --exclude="$version/idlelib" --exclude="$version/lib2to3" \
    --exclude="$version/pydoc_data" --exclude="$version/sqlite3" --exclude="$version/test" \
    --exclude="$version/tkinter" --exclude="$version/turtle*" --exclude="$version/unittest" \
    --exclude="$version/venv" --exclude="$version/wsgiref" --exclude="$version/xmlrpc" \
    --exclude='_bz2.*.so' --exclude='_codecs_*.so' --exclude='_crypt.*.so' --exclude='_curses*.so' \
    --exclude='_dbm.*.so' --exclude='_hashlib.*.so' --exclude='_lzma.*.so' --exclude='_sqlite3.*.so' \
    --exclude='_ssl.*.so' \
    --exclude='_test*.so' --exclude='_tkinter.*.so' --exclude='_uuid.*.so' --exclude='_xx*.so' --exclude='_gdbm.*.so' \
    --exclude='audioop.*.so' --exclude='nis.*.so' --exclude='ossaudiodev.*.so' --exclude='readline.*.so' \
    "$version" | tar -x -C "$tree$home/lib"

linked=$(
    cd "$tree/"
    set -- "${home#/}/bin/$version" "${home#/}/lib/$version"/lib-dynload/*.so
    chroot "$tree/" ldd "$@"
)
printf '%s\n' "$linked" | awk '$2 == "=>" && $3 ~ "^/" { print $3 }' | sort -u | while read -r library; do
    case $library in
        # They belong together with the loader and the kernel.
        */libc.so.* | */libm.so.* | */libdl.so.* | */libpthread.so.* | */librt.so.* | */libutil.so.*) ;;
        *) cp -L --preserve=mode,timestamps "$tree$library" "$tree$home/lib/" ;;
    esac
done

# A path for libraries that children do not inherit. Python finds its library by the name that it was started as.
loader=$(printf '%s\n' "$linked" | awk '$1 ~ "^/.*/ld-linux" { print $1; exit }')
name=
if chroot "$tree/" "$loader" --help | grep -q -e --argv0; then name="--argv0 $home/python3"; fi
printf '#!/bin/sh\nexec %s --library-path %s/lib%s %s/bin/%s "$@"\n' \
    "$loader" "$home" "${name:+ $name}" "$home" "$version" > "$tree$home/python3"
chmod 0755 "$tree$home/python3"
chroot "$tree/" "$home/python3" -I -S -m compileall -q "$home/guest"
